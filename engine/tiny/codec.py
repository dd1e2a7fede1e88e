"""The speech codec: a waveform to frames of 16 codes and back, as differentiable torch.

`Decoder` is `engine.model.code2wav` over whole utterances; its parameters carry the names of the released checkpoint. `Encoder`
is ours alone and never exported. `ResidualQuantizer` has no codebooks of its own: it searches the decoder's embedding table,
so what it picks is what the decoder hears. It keeps latents simple while the codec is trained. The codes that are served are
others, `Axes`: of theirs a code is near what the codes beside it mean, so one that is a little off does little harm.

The encoder reads a log-mel spectrogram, not samples. The codes then say nothing about phase, which 1,200 bits a second can't
carry, and the same sound gets the same codes wherever its periods fall in a frame: fewer surprises for whoever predicts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.code2wav import DILATIONS, NORM_EPS
from engine.model.config import Code2WavConfig

SAMPLE_RATE = 24000
# Of the spectrogram that the encoder reads: bins, and samples between its columns. Halved three times, 100 columns a second
# are 12.5 frames.
MEL_BINS = 100
MEL_WINDOW = 1024
MEL_HOP = 240
HALVINGS = 3
# Quieter than this is silence: 80 dB under full scale, the floor of every logarithm here.
QUIET = 1e-4
BRANCH_SCALE = 0.1  # what a residual branch of the decoder starts with
MEMORY = 0.99  # share of the running counts and sums that a batch leaves in place
IDLE_SHARE = 0.05  # a code chosen less often than this share of its book's average is put somewhere else
STARTING_ROUNDS = 8  # of moving a book onto the clusters of the first batch
# Parts of a latent that books share: a frame that is not quite foreseen gets a few codes wrong, not all that build on one.
PARTS = 8
# The codes of the longest axis reach this many standard deviations to either side.
REACH = 3.0


def mel_filters(bins: int, window: int) -> Tensor:
    """Triangles that rise and fall between neighbours on the mel scale, 0 to 12 kHz: [bins, window // 2 + 1], each sums to 1.

    A triangle narrower than the distance of two lines of the spectrum takes the line nearest to its middle.
    """
    top = 2595.0 * math.log10(1.0 + SAMPLE_RATE / 2 / 700.0)
    edges = 700.0 * (10.0 ** (torch.linspace(0.0, top, bins + 2, dtype=torch.float64) / 2595.0) - 1.0)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    lines = torch.linspace(0.0, SAMPLE_RATE / 2, window // 2 + 1, dtype=torch.float64)
    filters = torch.minimum((lines - low) / (middle - low), (high - lines) / (high - middle)).clamp(min=0.0)
    nearest = F.one_hot((lines - middle).abs().argmin(1), len(lines)).to(filters.dtype)
    filters = torch.where(filters.sum(1, keepdim=True) > 0, filters, nearest)
    return (filters / filters.sum(1, keepdim=True)).float()


def magnitudes(wave: Tensor, window: Tensor, hop: int) -> Tensor:
    """Spectrum of `wave` [B, N] under `window` [W], one column a `hop`: [B, W // 2 + 1, N // hop].

    A tone of amplitude a reads about a / 2. Column t is centred on the middle of samples hop * t to hop * (t + 1).
    """
    width = len(window)
    before = (width - hop) // 2
    padded = F.pad(wave, (before, width - hop - before))
    spectrum = torch.stft(padded, width, hop, window=window, center=False, return_complex=True)
    # A root has no gradient at 0, so it never sees one.
    return (spectrum.real.square() + spectrum.imag.square()).clamp(min=1e-12).sqrt() / window.sum()


class LogMel(nn.Module):
    """Natural logarithms of mel magnitudes, `QUIET` at the least."""

    def __init__(self, bins: int, window: int, hop: int) -> None:
        super().__init__()
        self.hop = hop
        self.register_buffer("filters", mel_filters(bins, window), persistent=False)
        self.register_buffer("window", torch.hann_window(window), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        """Turn `wave` [B, N] into [B, bins, N // hop]."""
        mel = self.get_buffer("filters") @ magnitudes(wave, self.get_buffer("window"), self.hop)
        return mel.clamp(min=QUIET).log()


class _PaddedConv(nn.Module):
    """A convolution over [B, C, L] that sees `before` columns to the left and `after` to the right of its own."""

    def __init__(
        self, inputs: int, outputs: int, before: int, after: int, *, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, before + 1 + after, dilation=dilation, groups=groups)
        self.around = (before * dilation, after * dilation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.pad(x, self.around))
        return out


class _Stretch(nn.Module):
    """A transposed convolution over [B, C, L] whose two ends lose `crop` columns each."""

    def __init__(self, inputs: int, outputs: int, width: int, stride: int, crop: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, width, stride, padding=crop)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class _Snake(nn.Module):
    """SnakeBeta over [B, C, L]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        wave: Tensor = torch.sin(x * self.alpha.exp()[:, None])
        return torch.addcmul(x, wave, wave * (1.0 / (self.beta.exp() + 1e-9))[:, None])


class _ConvNext(nn.Module):
    """A ConvNeXt block over [B, C, L]: a depthwise convolution, then a network of two layers for each column."""

    def __init__(self, width: int, before: int, after: int) -> None:
        super().__init__()
        self.dwconv = _PaddedConv(width, width, before, after, groups=width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), BRANCH_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.norm(self.dwconv(x).transpose(1, 2))
        rows = self.gamma * self.pwconv2(F.gelu(self.pwconv1(rows)))
        return x + rows.transpose(1, 2)


class _Scale(nn.Module):
    """A factor for each channel of [B, T, H]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), BRANCH_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class _Attention(nn.Module):
    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_dim
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.hidden, inner, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(inner, config.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(_rotate(q, *rope), _rotate(k, *rope), v, attn_mask=mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [B, heads, T, d] by halves with tables [T, d]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class _GatedMlp(nn.Module):
    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.hidden, config.inter, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.inter, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.eps)
        self.self_attn, self.mlp = _Attention(config), _GatedMlp(config)
        self.self_attn_layer_scale, self.mlp_layer_scale = _Scale(config.hidden), _Scale(config.hidden)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rope, mask))
        out: Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return out


class _Transformer(nn.Module):
    """Layers over [B, T, H] whose frames see themselves and the `window` - 1 before them."""

    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([_Layer(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.hidden, config.eps)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], device=x.device)
        age = steps[:, None] - steps[None]
        mask = (age >= 0) & (age < self.config.window)
        halves = torch.arange(0, self.config.head_dim, 2, device=x.device).float() / self.config.head_dim
        angles = (steps[:, None] * (1.0 / self.config.rope_theta**halves)).repeat(1, 2)
        rope = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, rope, mask)
        out: Tensor = self.norm(x)
        return out


class _Unit(nn.Module):
    """A residual unit over [B, C, L]."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.act2 = _Snake(channels), _Snake(channels)
        self.conv1 = _PaddedConv(channels, channels, 6, 0, dilation=dilation)
        self.conv2 = _PaddedConv(channels, channels, 0, 0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv2(self.act2(self.conv1(self.act1(x))))
        return out


class _Block(nn.Module):
    """A decoder block: [B, C, L] to [B, C // 2, (L - 1) * rate]."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        narrow = channels // 2
        stretch = _Stretch(channels, narrow, 2 * rate, rate, rate)
        self.block = nn.Sequential(_Snake(channels), stretch, *(_Unit(narrow, dilation) for dilation in DILATIONS))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


class Decoder(nn.Module):
    """The vocoder over whole utterances. Its `state_dict` has the released names, less their prefix `code2wav.`."""

    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.code_embedding = nn.Embedding(config.quantizers * config.codebook, hidden)
        # The quantizer moves it, not a gradient.
        self.code_embedding.weight.requires_grad_(False)
        self.pre_transformer = _Transformer(config)
        self.upsample = nn.ModuleList(
            nn.Sequential(_Stretch(hidden, hidden, ratio, ratio, 0), _ConvNext(hidden, 6, 0)) for ratio in config.ratios
        )
        widths = [config.decoder_dim >> place for place in range(len(config.rates) + 1)]
        blocks = [_Block(width, rate) for width, rate in zip(widths, config.rates, strict=False)]
        first, last = _PaddedConv(hidden, widths[0], 6, 0), _PaddedConv(widths[-1], 1, 6, 0)
        self.decoder = nn.Sequential(first, *blocks, _Snake(widths[-1]), last)

    @property
    def frame(self) -> int:
        """Samples of one frame (no tensors)."""
        return math.prod(self.config.ratios) * math.prod(self.config.rates)

    def embed(self, codes: Tensor) -> Tensor:
        """Mean of the embeddings of `codes` [B, quantizers, T] int64; returns [B, T, H]."""
        offsets = torch.arange(self.config.quantizers, device=codes.device)[:, None] * self.config.codebook
        rows: Tensor = self.code_embedding(codes + offsets)
        return rows.mean(1)

    def speak(self, latents: Tensor) -> Tensor:
        """Turn `latents` [B, T, H], means of code embeddings, into waves [B, n] in [-1, 1].

        A last column of each stretch waits for a next frame: at rates 8, 5, 4, 3 that leaves n = 1920 T - 555.
        """
        x = self.pre_transformer(latents).transpose(1, 2)
        for stage in self.upsample:
            x = stage(x)
        wave: Tensor = self.decoder(x)
        return wave[:, 0].clamp(-1.0, 1.0)

    def forward(self, codes: Tensor) -> Tensor:
        """Turn `codes` [B, quantizers, T] int64 into waves [B, n], as `speak` does."""
        return self.speak(self.embed(codes))

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the parameters, float32 on the CPU, under the names of the released checkpoint (their shapes there)."""
        return {
            f"code2wav.{name}": tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
            for name, tensor in self.state_dict().items()
        }


class Encoder(nn.Module):
    """A waveform to one latent a frame. It sees both ways, so an utterance is encoded whole."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.mel = LogMel(MEL_BINS, MEL_WINDOW, MEL_HOP)
        stages: list[nn.Module] = [_PaddedConv(MEL_BINS, width, 1, 1)]
        for _ in range(HALVINGS):
            stages += [_ConvNext(width, 3, 3), nn.Conv1d(width, width, 4, stride=2, padding=1)]
        self.stages = nn.Sequential(*stages, _ConvNext(width, 3, 3), _ConvNext(width, 3, 3))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, hidden)

    def forward(self, wave: Tensor) -> Tensor:
        """Turn `wave` [B, T * 1920] into latents [B, T, H]."""
        # Silence to full scale becomes -1 to 1.
        x = 1.0 - 2.0 * self.mel(wave) / math.log(QUIET)
        out: Tensor = self.out(self.norm(self.stages(x).transpose(1, 2)))
        return out


@dataclass(frozen=True, slots=True)
class Quantized:
    """What the quantizer made of latents [B, T, H], with B * T = N rows, Q codebooks and parts of W values.

    `latents` [B, T, H] is the mean of the chosen embeddings, with the gradient passed straight through; `codes` [Q, N] int64;
    `residuals` [Q, N, W] is what each codebook saw; `commitment` is a scalar, how far the latents are off.
    """

    latents: Tensor
    codes: Tensor
    residuals: Tensor
    commitment: Tensor


class ResidualQuantizer(nn.Module):
    """Chooses codes book by book, each for what the books before it left over, and moves the books after what chose them.

    A book looks at one of P equal parts of a latent, W of its H values, book q at part q % P: the first P books, a level, say
    all of it roughly, and each level after it says it better. The decoder takes the mean over the Q books, so an embedding is
    Q times what its codebook subtracts, and zero in the other parts. Running counts and sums (buffers [Q, K] and [Q, K, W])
    decide where an embedding lies; no gradient does.
    """

    counts: Tensor
    sums: Tensor

    def __init__(self, books: int, codes: int, hidden: int, parts: int = 1) -> None:
        """ValueError unless `parts` divides both `books` and `hidden`."""
        super().__init__()
        if books % parts or hidden % parts:
            raise ValueError(f"{books} codebooks and latents of {hidden} values can't be parted into {parts}")
        self.books, self.size, self.parts, self.levels = books, codes, parts, books // parts
        self.register_buffer("counts", torch.zeros(books, codes))
        self.register_buffer("sums", torch.zeros(books, codes, hidden // parts))

    def forward(self, latents: Tensor, table: Tensor, active: Tensor) -> Quantized:
        """Quantize `latents` [B, T, H] by `table` [Q * K, H]; clip b hears its first `active` [B] int64 books only."""
        rows = latents.flatten(0, 1)
        parted = self._parted(rows)
        rest = parted.detach()
        total, off = torch.zeros_like(rest), rows.new_zeros(())
        codes, residuals = [], []
        heard = active.repeat_interleave(latents.shape[1]) > torch.arange(self.books, device=rows.device)[:, None]
        for words, audible in zip(self._words(table), heard.view(self.levels, self.parts, -1, 1), strict=True):
            nearest = _nearest(rest, words)
            chosen = _looked_up(words, nearest)
            codes.append(nearest)
            residuals.append(rest)
            rest = rest - chosen
            total = total + chosen * audible
            reached = parted.detach() - rest
            off = off + (parted - reached).square().mean()
        joined = total.transpose(0, 1).flatten(1)
        passed = (rows + (joined - rows).detach()).view_as(latents)
        return Quantized(passed, torch.cat(codes), torch.cat(residuals), off / self.levels)

    @torch.no_grad()
    def start(self, latents: Tensor, table: Tensor, generator: torch.Generator) -> None:
        """Put every book of `table` [Q * K, H] on clusters of what reaches it from `latents` [B, T, H]."""
        rest = self._parted(latents.flatten(0, 1))
        count = rest.shape[1]
        levels = []
        for _ in range(self.levels):
            picks = torch.randint(count, (self.parts, self.size), generator=generator, device=rest.device)
            words = _looked_up(rest, picks)
            for _ in range(STARTING_ROUNDS):
                chosen = F.one_hot(_nearest(rest, words), self.size).to(rest.dtype)
                often = chosen.sum(1)[..., None]
                words = torch.where(often > 0, chosen.transpose(1, 2) @ rest / often.clamp(min=1.0), words)
            levels.append(words)
            rest = rest - _looked_up(words, _nearest(rest, words))
        self.counts.fill_(count / self.size)
        self.sums.copy_(torch.cat(levels) * self.counts[..., None])
        self._move(table)

    @torch.no_grad()
    def learn(self, seen: Quantized, table: Tensor, generator: torch.Generator) -> None:
        """Move `table` [Q * K, H] after the batch that `seen` holds; a code that few rows choose moves onto a random row."""
        chosen = F.one_hot(seen.codes, self.size).to(seen.residuals.dtype)
        self.counts.lerp_(chosen.sum(1), 1.0 - MEMORY)
        self.sums.lerp_(chosen.transpose(1, 2) @ seen.residuals, 1.0 - MEMORY)
        share = self.counts.mean(1, keepdim=True)
        idle = (self.counts < IDLE_SHARE * share)[..., None]
        rows = seen.residuals.shape[1]
        picks = torch.randint(rows, (self.books, self.size), generator=generator, device=table.device)
        self.sums.copy_(torch.where(idle, _looked_up(seen.residuals, picks) * share[..., None], self.sums))
        self.counts.copy_(torch.where(idle[..., 0], share, self.counts))
        self._move(table)

    def _parted(self, rows: Tensor) -> Tensor:
        """The parts [P, N, W] of `rows` [N, H]."""
        return rows.view(len(rows), self.parts, -1).transpose(0, 1)

    def _words(self, table: Tensor) -> Tensor:
        """What each code subtracts from its part, [levels, P, K, W], as the embeddings `table` [Q * K, H] say."""
        return self._own(table.detach()) / self.books

    def _move(self, table: Tensor) -> None:
        """Put the embeddings `table` [Q * K, H] where counts and sums say."""
        words = self.sums / self.counts[..., None]
        table.zero_()
        self._own(table).copy_(words.view(self.levels, self.parts, self.size, -1) * self.books)

    def _own(self, table: Tensor) -> Tensor:
        """A view [levels, P, K, W] of `table` [Q * K, H]: of each book's embeddings the part that it looks at."""
        whole = table.view(self.levels, self.parts, self.size, self.parts, -1)
        return whole.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _nearest(rows: Tensor, words: Tensor) -> Tensor:
    """The code of `words` [P, K, W] nearest to each of `rows` [P, N, W]; returns [P, N] int64."""
    return (words.square().sum(2)[:, None] - 2.0 * rows @ words.transpose(1, 2)).argmin(2)


def _looked_up(rows: Tensor, places: Tensor) -> Tensor:
    """Those of `rows` [P, N, W] at `places` [P, n]; returns [P, n, W]."""
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[2]))


@dataclass(frozen=True, slots=True, eq=False)
class Axes:
    """Latents as Q values, and each value as one of K codes in equal steps: code k stands for k - (K - 1) / 2 steps.

    `mean` [H] is the middle and `directions` [H, Q] are the principal axes of what `fit` saw, the longest first; `step` [] is
    the length of a step, the same on every axis. float32.
    """

    mean: Tensor
    directions: Tensor
    step: Tensor
    codes: int

    @classmethod
    def fit(cls, latents: Tensor, axes: int, codes: int) -> Axes:
        """Fit `axes` axes of `codes` codes to `latents` [N, H]; ValueError when they have no extent."""
        mean = latents.mean(0)
        variance, directions = torch.linalg.eigh(torch.cov((latents - mean).t().double()))
        longest = float(variance[-1]) ** 0.5
        if not longest > 0:
            raise ValueError(f"{len(latents)} latents are all alike: no codes can tell them apart")
        directions = directions.flip(1)[:, :axes]
        # An axis may point either way; let its largest part be positive.
        largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
        step = torch.tensor(2 * REACH * longest / codes)
        return cls(mean, (directions * largest.sign()).float(), step, codes)

    def encode(self, latents: Tensor) -> Tensor:
        """Codes [..., Q] int64 of `latents` [..., H]."""
        places = (latents - self.mean) @ self.directions / self.step + self.codes / 2
        return places.floor().clamp(0, self.codes - 1).long()

    def table(self) -> Tensor:
        """The decoder's embeddings [Q * K, H]: the mean of one of each axis is the latent that the codes stand for."""
        steps = torch.arange(self.codes, device=self.mean.device) - (self.codes - 1) / 2
        shares = steps[:, None] * self.step * self.directions.t()[:, None] * self.directions.shape[1]
        return (self.mean + shares).flatten(0, 1)


class Codec(nn.Module):
    """Encoder, quantizer and decoder."""

    def __init__(self, config: Code2WavConfig, width: int = 128) -> None:
        super().__init__()
        self.encoder = Encoder(config.hidden, width)
        self.quantizer = ResidualQuantizer(
            config.quantizers, config.codebook, config.hidden, min(PARTS, config.quantizers)
        )
        self.decoder = Decoder(config)
        if self.decoder.frame != MEL_HOP << HALVINGS:
            raise ValueError(f"a frame must be {MEL_HOP << HALVINGS} samples, is {self.decoder.frame}")

    @property
    def table(self) -> Tensor:
        """The decoder's embedding table [quantizers * codebook, H], which the quantizer searches and moves."""
        return self.decoder.code_embedding.weight

    def forward(self, wave: Tensor, active: Tensor) -> tuple[Tensor, Quantized]:
        """Code `wave` [B, T * 1920] and speak it from the first `active` [B] codebooks; returns [B, n] and the codes."""
        seen: Quantized = self.quantizer(self.encoder(wave), self.table, active)
        return self.decoder.speak(seen.latents), seen

    @torch.no_grad()
    def latents(self, wave: Tensor) -> Tensor:
        """Latents [frames, H] of `wave` [N], which is padded with silence to whole frames of 1,920 samples."""
        padded = F.pad(wave, (0, -len(wave) % self.decoder.frame))
        found: Tensor = self.encoder(padded[None])[0]
        return found
