"""Sentences that the small model hears, repeats and speaks: a grammar made here, and LibriSpeech's reference texts.

What is spoken is written in words, never in digits, so that it can be told from the sound alone. Sentences have sentence case
and end in a full stop, a question mark or an exclamation mark; reference texts, which come in capitals without marks, are
brought to the same form.

Held out of training by construction: one in eight of all texts, by a checksum (`withheld`); the templates of
`_HELD_OUT_TEMPLATES`; and in each list of fillers what stands behind the bar. A training sentence has none of the three. An
unseen sentence is withheld, and its template and its words are those of training sentences. A held-out sentence has a held-out
template, and each of its slots takes any filler, so about one slot in eight shows a filler that no training sentence has there.
Numbers, times, prices, dates, days and months are closed classes and are not held out. Reference texts may hold any word, a
held-out filler too; which files are trained on is the caller's choice.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

FEWEST_WORDS = 3
MOST_WORDS = 20
# Longer reference texts are cut into even pieces: speech for training is short.
PIECE_WORDS = 16
_WITHHELD_EVERY = 8

# fmt: off
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
    "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
)
_ROUND_ORDINALS = ("twentieth", "thirtieth")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)
# fmt: on

# Commas part the fillers; those behind the bar are held out.
_FILLERS = {
    "girl": """
        Anna, Maria, Lucy, Emma, Sarah, Julia, Nora, Alice, Clara, Helen, Grace, Ruth, Laura, Diana, Susan, Kate,
        Rose, Linda, Eva, Sophie, Olivia, Nina, Carol, Ellen, Molly, Irene, Paula, Teresa | Mary, Jane, Margaret,
        Rachel
        """,
    "boy": """
        Tom, Peter, David, Simon, Oscar, Felix, Martin, Henry, Paul, Adam, Daniel, Victor, Leo, Max, Frank, Oliver,
        Jack, Robert, Samuel, Hugo, Walter, Ben, Anton, Edward, Marcus, Philip, Alan, Bruno | John, George, James,
        Charles
        """,
    "name": "{girl}, {boy}",
    "city": """
        Paris, Berlin, Madrid, Vienna, Dublin, Oslo, Lisbon, Prague, Tokyo, Chicago, Boston, Cairo, Athens, Geneva,
        Denver, Seattle, Toronto, Sydney, Milan, Dallas, Moscow, Warsaw, Mumbai, Nairobi | London, Rome, Venice, New
        York
        """,
    "country": """
        France, Germany, Spain, Italy, Japan, Canada, Brazil, Egypt, Norway, Sweden, Poland, Greece, Mexico, Kenya,
        Portugal, Austria, China, Peru | England, India, Russia
        """,
    "person": """
        my mother, my father, my sister, my brother, my uncle, my aunt, my neighbour, our teacher, the doctor, the
        baker, the farmer, the driver, the nurse, the painter, the waiter, the captain, the gardener, the singer,
        the pilot, the dentist, the postman, the shepherd, the tailor, the judge, the cook, my grandmother, my
        cousin, the plumber | the king, the old man, the soldier, my friend
        """,
    "place": """
        market, park, station, library, school, beach, museum, bakery, hospital, theatre, airport, bridge, church,
        farm, garden, hotel, office, river, lake, forest, castle, village, cinema, bank, mill, stable, playground,
        restaurant, bookshop, pharmacy, zoo | harbour, shop, mountain, field
        """,
    "room": """
        kitchen, bedroom, bathroom, cellar, attic, hall, garage, dining room, study, nursery, pantry | parlour,
        corridor
        """,
    "spot": """
        table, shelf, chair, bed, sofa, roof, stairs, carpet, desk, bench, fence, pillow, counter, ladder, window
        sill | floor, wall
        """,
    "object": """
        ball, key, lamp, book, clock, hat, coat, umbrella, basket, bottle, box, candle, chair, cup, drum, guitar,
        kite, knife, ladder, letter, map, mirror, pen, pencil, phone, picture, piano, plate, purse, ring, rope,
        scarf, shoe, spoon, stamp, suitcase, ticket, towel, toy, vase, wallet, watch, whistle, bell, blanket, brush,
        button, camera, fork, glove, hammer, jacket, kettle, newspaper, notebook, parcel, radio, ribbon, saddle,
        shovel, violin, wheel | flag, paper, stone, sword
        """,
    "objects": """
        books, boxes, candles, chairs, cups, keys, letters, pencils, plates, tickets, flowers, stamps, coins,
        bottles, bags, hats, shoes, buttons, ribbons, balloons, marbles, postcards, spoons, towels, lamps, mirrors |
        papers, stones
        """,
    "fruit": """
        apple, orange, lemon, melon, banana, peach, pear, plum, cherry, tomato, potato, onion, carrot | nut,
        mushroom
        """,
    "fruits": """
        apples, oranges, lemons, melons, bananas, peaches, pears, plums, cherries, tomatoes, potatoes, onions,
        carrots, eggs, rolls, cakes, biscuits, pies, sausages, muffins | nuts, grapes
        """,
    "food": """
        bread, cheese, soup, rice, fish, salad, honey, butter, chicken, pasta, cake, porridge, jam, yoghurt, ham,
        pizza, chocolate, ice cream, toast, beef | meat, fruit
        """,
    "drink": "tea, coffee, milk, water, juice, lemonade, cocoa, soda | wine",
    "animal": """
        dog, cat, horse, cow, sheep, goat, pig, rabbit, fox, bear, lion, tiger, monkey, mouse, duck, goose, chicken,
        owl, parrot, sparrow, frog, snake, turtle, donkey, camel, elephant, squirrel, hamster, penguin, dolphin,
        spider, beetle | wolf, bird, deer, eagle
        """,
    "animals": """
        dogs, cats, horses, cows, goats, pigs, rabbits, foxes, bears, ducks, hens, owls, parrots, frogs, bees,
        donkeys, sparrows, squirrels, penguins, butterflies | birds, wolves
        """,
    "colour": "red, blue, green, yellow, white, black, brown, grey, pink, purple, orange | golden, silver",
    "kind": """
        old, new, small, big, heavy, light, broken, empty, cheap, pretty, round, square, soft, clean, dirty, wet,
        dry, wooden, shiny, warm, cold, long, short, strange, plain, thin, thick, sharp, tiny, huge | great,
        beautiful, dark, little
        """,
    "mood": """
        happy, sad, tired, hungry, thirsty, angry, busy, calm, proud, sick, late, ready, nervous, cheerful, bored,
        worried, lonely, sleepy | afraid, glad, surprised
        """,
    "skill": """
        sing, swim, dance, draw, cook, drive, ski, skate, whistle, juggle, climb trees, ride a bicycle, play chess,
        play the violin, play the drums, bake bread, speak French, speak Spanish | ride a horse, sew, fish
        """,
    "activity": """
        reading, singing, swimming, dancing, cooking, painting, gardening, running, fishing, skating, hiking,
        playing chess, baking bread, feeding the ducks, watching the stars, washing the car, writing letters |
        walking, hunting, sailing
        """,
    "vehicle": "bus, train, car, boat, bicycle, taxi, tram, plane, truck, ferry, van, motorbike | ship, carriage",
    "meal": "breakfast, lunch, dinner, supper, a snack | tea time",
    "weather": """
        sunny, rainy, cloudy, windy, foggy, snowy, stormy, cold, warm, hot, dry, wet, mild, cool, icy, humid, chilly
        | bright, dull, calm
        """,
    "storm": """
        rain, snow, fog, thunder, hail, frost, sunshine, drizzle, a strong wind, a light breeze, sleet | a storm,
        mist
        """,
    "season": "spring, summer, autumn, winter",
    "part": "morning, afternoon, evening, night",
    "when": """
        yesterday, today, last night, last week, this morning, this afternoon, in the evening, after school, before
        lunch, on {day}, in {month}, an hour ago, at noon, at midnight, before sunrise | one day, at once
        """,
    "later": """
        tomorrow, tonight, next week, next month, next year, soon, on {day}, in {month}, in the morning, after
        dinner | at last
        """,
    "way": """
        slowly, quickly, quietly, carefully, loudly, happily, politely, gently, alone, again | softly, suddenly,
        together
        """,
    "went": """
        walked, ran, drove, cycled, hurried, travelled, returned, rushed, strolled, went by bus, went by train |
        came, rode, wandered
        """,
    "got": """
        bought, found, lost, sold, borrowed, painted, cleaned, dropped, carried, hid, wrapped, repaired, washed |
        took, kept, held
        """,
    "did": """
        laughed, waited, slept, smiled, cried, sang, danced, shouted, whistled, fell asleep, made tea, sat down,
        told a joke, opened the window, closed the door, washed the dishes, read a book, fed the cat, lit a candle |
        spoke, prayed, turned away
        """,
    "must": """
        close the door, open the window, wash your hands, feed the cat, water the plants, call your sister, turn
        left, turn right, switch off the light, lock the gate, sweep the floor, set the table, bring the bread,
        write it down, read the next page, wait outside, count to ten, speak louder, take a deep breath, fold the
        towels, peel the potatoes, stir the soup, boil the water, empty the basket, post the letter, pack the
        suitcase, clean the mirror | light the fire, ring the bell, shut the door, follow the road
        """,
    "thing": "{object}, {object}, {kind} {object}, {colour} {object}, {kind} {colour} {object}",
    "creature": "{animal}, {animal}, {kind} {animal}, {colour} {animal}",
    "amount": "{count} {objects}, {count} {fruits}, {count} {kind} {objects}, {count} {animals}",
    "day": ", ".join(DAYS),
    "month": ", ".join(MONTHS),
    "unit": "minutes, hours, days, weeks, months, years",
}

_TEMPLATES = {
    "numbers": """
        The number is {number}.
        My number is {number}, not {number}.
        There are {number} {objects} in the {room}.
        We counted {number} {animals} near the {place}.
        The answer is {number}, I think.
        Please write down the number {number}.
        {name} has {amount} and {amount}.
        {person} sold {number} {fruits} {when}.
        The {place} is {number} miles from {city}.
        It takes {count} {unit} to get to {city}.
        Page {number} is missing from the {object}.
        The {vehicle} to {city} has {number} seats.
        {name} is {number} years old.
        About {number} people live in this village.
        Add {count} {fruits} and {count} spoons of sugar.
        {name} lives at number {number}, near the {place}.
        """,
    "dates": """
        My birthday is on {date}.
        Today is {day}, {date}.
        The {place} opens on {date}.
        {name} was born on {date}.
        {name} was born in {year}.
        The {place} was built in {year}.
        We moved to {country} in {month}.
        {person} will be back on {date}.
        The {season} holidays begin on {date}.
        School starts again on {date}.
        In {year} {name} moved from {city} to {city}.
        The meeting is on {day}, not on {day}.
        {month} was {weather} and {weather} this year.
        I will see you on {day} at {time}.
        The letter is dated {date}.
        """,
    "times": """
        It is {time}.
        It is now exactly {time}.
        The {vehicle} leaves at {time}.
        The {vehicle} to {city} leaves at {time} on {day}.
        We have {meal} at {time}.
        {person} gets up at {time} every day.
        The {place} closes at {time} on {day}.
        Wake me up at {time}, please.
        {name} came home at {time}, very {mood}.
        Let us meet at the {place} at {time}.
        The film begins at {time} and lasts {count} hours.
        The {vehicle} from {city} is {number} minutes late.
        Dinner will be ready in {number} minutes.
        The shops are open from {time} to {time}.
        {person} waited from {time} until {time}.
        """,
    "prices": """
        This {object} costs {price}.
        The {thing} costs {price}.
        {name} paid {price} for {a thing}.
        {count} {fruits} cost {price}.
        A ticket to {city} costs {price}.
        The room costs {price} a night.
        I have only {price} left.
        {person} gave me {price} for the {object}.
        The {meal} was {price}, which is too much.
        Can I have the {object} for {price}?
        That makes {price}, please.
        The {thing} was {price}, and now it is {price}.
        {name} owes {name} {price}.
        A cup of {drink} is {price} here.
        """,
    "names": """
        My name is {name}.
        Hello, my name is {name} and I come from {city}.
        This is {name}, and that is {name}.
        {name} and {name} are friends.
        {girl} is the sister of {boy}.
        Her name is {girl}, and his name is {boy}.
        Please call {name} {when}.
        {name} can {skill}, but {name} can not.
        Have you met {name} from {country}?
        {name} likes {activity}, and {name} likes {activity}.
        {girl} said that she was {mood}.
        {boy} said that he was {mood}.
        Good {part}, {name}, how are you?
        {name} and {person} went to {city} {later}.
        {name} named the {animal} {name}.
        Thank you for the {object}, {name}.
        """,
    "places": """
        The {place} is next to the {place}.
        {city} is a city in {country}, says {name}.
        We live near {a kind} {place}.
        There is {a creature} in the {room}.
        The {object} is in the {room}, on the {spot}.
        Go past the {place} and turn left at the {place}.
        {person} works at the {place} in {city}.
        How do I get to the {place}?
        The {place} in {city} is {kind} and {kind}.
        I left my {object} at the {place}.
        {name} lives between the {place} and the {place}.
        The road to {city} goes through {a kind} forest.
        {person} travelled from {city} to {city} by {vehicle}.
        Behind the {place} there is {a kind} garden.
        The {animals} sleep behind the {place}.
        My {object} is not on the {spot}, it is under the {spot}.
        """,
    "questions": """
        Where is the {thing}?
        Where did you put my {object}?
        What time is it in {city}?
        What did {name} eat for {meal}?
        Do you like {food} with {food}?
        Who is the {kind} man at the {place}?
        Why is {person} so {mood}?
        When does the {vehicle} to {city} leave?
        Can you {skill}?
        How many {objects} do you need?
        How far is it from {city} to {city}?
        Have you seen my {colour} {object}?
        Would you like some {drink}?
        Did {person} find the {object} {when}?
        Is {person} at home {later}?
        How old is {name}?
        Which {object} is yours, the {colour} one or the {colour} one?
        What is the name of your {animal}?
        Are the {animals} in the {place} again?
        What colour is the {object}?
        """,
    "weather": """
        It is {weather} today.
        It was {weather} and {weather} {when}.
        It will be {weather} {later}.
        The weather in {city} is {weather}.
        There will be {storm} in {country} {later}.
        It is too {weather} for {activity}.
        In {season} it is often {weather} here.
        Expect {storm} in the {part} and {storm} at night.
        The temperature is {number} degrees in {city}.
        After the rain the {place} was {kind}.
        Take your {object}, because it is {weather}.
        {storm} is expected in {city} on {day}.
        {person} does not like {weather} weather.
        The {season} in {country} is {weather} and {weather}.
        The wind was so strong that the {object} fell off the {spot}.
        """,
    "stories": """
        {girl} {went} to the {place} and {got} {a thing}.
        {boy} {went} to the {place} and {got} {a thing}.
        {girl} {got} {a thing}, and then she {did}.
        {boy} {got} {a thing}, and then he {did}.
        {person} {got} {amount} and gave them to {name}.
        The {creature} ran into the {room} and hid under the {spot}.
        {girl} was {mood}, so she {did}.
        {boy} was {mood}, so he {did}.
        {when} {name} {did}, and {name} {did}.
        It was {a weather} {part}, and {name} {did}.
        {name} saw {a creature} near the {place} and {did}.
        {person} {did} {way} and {went} home.
        The {animal} ate the {food}, and the {animal} drank the {drink}.
        {girl} asked {boy} for {a thing}, but he had only {a thing}.
        {name} {went} to {city} {when}, because {person} was {mood}.
        Once there was {a kind} {animal} that lived in the {place}.
        When {name} opened the {object}, {a creature} jumped out.
        {name} and {name} {got} {a thing} behind the {place}.
        {person} put the {food} on the {spot} and {did}.
        {person} smiled and gave {name} {a thing}.
        {name} ate {a fruit}, {a fruit} and some {food}.
        """,
    "instructions": """
        Please {must}.
        Please {must} and {must}.
        Do not forget to {must}.
        First {must}, then {must}.
        {name}, please {must}.
        {must} before {meal}, please.
        Put the {thing} on the {spot}.
        Put {amount} into the {object}.
        Bring me {a thing} from the {room}, please.
        Mix the {food} with the {drink} and wait {number} minutes.
        Give the {object} to {person}.
        Tell {name} that I am {mood}.
        Never {must} when the {animal} is {mood}.
        Take the {vehicle} to the {place} and {must}.
        Remember to {must} at {time}.
        Could you {must} {way}?
        """,
}

_HELD_OUT_TEMPLATES = {
    "numbers": """
        {person} has {number} {objects} at home.
        Only {number} of the {objects} are {kind}.
        {name} {got} {count} {kind} {objects} and {count} {fruits}.
        """,
    "dates": """
        The {vehicle} from {country} arrives on {date}.
        {person} left {city} in {month}, in the year {year}.
        """,
    "times": """
        {name} has to be at the {place} by {time}.
        At {time} {person} {did}.
        """,
    "prices": """
        {person} sold the {thing} for {price}.
        {name} found {price} in the {object}.
        """,
    "names": """
        {name}, this is my {animal}, and its name is {name}.
        I think that {name} can {skill} better than {name}.
        """,
    "places": """
        From the {place} you can see the {place} and the {place}.
        {name} {went} from {city} to the {place} in {country}.
        """,
    "questions": """
        Who {got} the {thing} {when}?
        Does {name} like {activity} in {season}?
        Why did {person} put the {object} in the {room}?
        """,
    "weather": """
        {name} likes {weather} days in {month}.
        It was so {weather} in {city} that {person} {did}.
        """,
    "stories": """
        {name} heard {a creature} in the {room}, and {name} {did}.
        {when} {person} {got} {a thing} at the {place}.
        The {animal} followed {name} to the {place} and slept on the {spot}.
        """,
    "instructions": """
        Please give {name} {a thing} and {must}.
        If you are {mood}, {must} and {must}.
        """,
}
KINDS = tuple(_TEMPLATES)

_SLOT = re.compile(r"\{(a )?([a-z_]+)\}")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
# Names of the fillers that are everyday words too, so their place in a reference text does not tell which is meant.
_ALSO_WORDS = frozenset(
    ("may", "march", "august", "rose", "grace", "frank", "carol", "max", "ben", "china", "turkey", "new", "king")
)


def number_words(number: int) -> str:
    """A whole number from 0 to 999 in words: 312 is three hundred and twelve."""
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f" {ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{ONES[hundreds]} hundred" + (f" and {number_words(rest)}" if rest else "")


def _number(rng: Random) -> str:
    return number_words(rng.randrange(*rng.choice(((2, 21), (21, 100), (100, 1000)))))


def _ordinal(number: int) -> str:
    """The day of a month in words, 1 to 30."""
    if number < 20:
        return _ORDINALS[number - 1]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens - 2]} {_ORDINALS[ones - 1]}" if ones else _ROUND_ORDINALS[tens - 2]


def _date(rng: Random) -> str:
    month = rng.choice(MONTHS)
    day = _ordinal(rng.randrange(1, 29 if month == "February" else 31))
    return rng.choice((f"the {day} of {month}", f"{month} the {day}"))


def _year(rng: Random) -> str:
    """A year that has one usual reading: 1810 to 1899, 1910 to 1999, 2001 to 2029."""
    century = rng.choice((18, 19, 20))
    rest = rng.randrange(1 if century == 20 else 10, 30 if century == 20 else 100)
    return f"two thousand and {ONES[rest]}" if rest < 10 else f"{number_words(century)} {number_words(rest)}"


def _time(rng: Random) -> str:
    hour = ONES[rng.randrange(1, 13)]
    return rng.choice(
        (
            f"{hour} o'clock",
            f"half past {hour}",
            f"a quarter {rng.choice(('past', 'to'))} {hour}",
            f"{rng.choice(('five', 'ten', 'twenty'))} {rng.choice(('past', 'to'))} {hour}",
            f"{hour} {number_words(rng.randrange(10, 60))}",
        )
    )


def _price(rng: Random) -> str:
    whole = f"{number_words(rng.randrange(2, 100))} {rng.choice(('dollars', 'euros', 'pounds'))}"
    cents = f"{number_words(rng.randrange(5, 100))} cents"
    return rng.choice((whole, whole, f"{whole} and {cents}", cents))


_CLOSED: Mapping[str, Callable[[Random], str]] = {
    "number": _number,
    "count": lambda rng: number_words(rng.randrange(2, 21)),
    "date": _date,
    "year": _year,
    "time": _time,
    "price": _price,
}
# What the functions above write beside numbers.
_CLOSED_TEXT = "hundred thousand and the of o'clock half past a quarter to dollars euros pounds cents"
_CLOSED_WORDS = frozenset((*ONES, *_TENS, *_ORDINALS, *_ROUND_ORDINALS, *map(str.lower, MONTHS), *_CLOSED_TEXT.split()))


def _choices(fillers: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fillers that training sentences take, and all of them."""
    trained, _, held_out = (" ".join(part.split()) for part in fillers.partition("|"))
    first = tuple(trained.split(", "))
    return first, (*first, *held_out.split(", ")) if held_out else first


def _lines(templates: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(line.strip() for line in text.strip().splitlines()) for kind, text in templates.items()}


_CHOICES = {slot: _choices(fillers) for slot, fillers in _FILLERS.items()}
_TRAINED_LINES, _HELD_OUT_LINES = _lines(_TEMPLATES), _lines(_HELD_OUT_TEMPLATES)


def fillers(slot: str, *, held_out: bool = False) -> tuple[str, ...]:
    """What may fill a slot, slots inside it unfilled; with `held_out` also what no training sentence has."""
    trained, every = _CHOICES[slot]
    return every if held_out else trained


def draw(slot: str, rng: Random, *, held_out: bool = False, used: set[str] | None = None) -> str:
    """Fill one slot. `used` are fillers that are taken already; what is drawn is added to it."""
    taken = set() if used is None else used
    if slot in _CLOSED:
        return _CLOSED[slot](rng)
    choice = rng.choice(fillers(slot, held_out=held_out))
    while choice in taken:
        choice = rng.choice(fillers(slot, held_out=held_out))
    if "{" in choice:
        return _filled(choice, rng, held_out, taken)
    taken.add(choice)
    return choice


def with_article(noun: str) -> str:
    """The noun with a or an before it; no filler has a first letter that sounds otherwise than it is written."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _filled(template: str, rng: Random, held_out: bool, used: set[str]) -> str:
    def value(match: re.Match[str]) -> str:
        text = draw(match[2], rng, held_out=held_out, used=used)
        return with_article(text) if match[1] else text

    return _SLOT.sub(value, template)


def capitalised(text: str) -> str:
    """The text with its first letter as a capital, the others as they are."""
    return text[:1].upper() + text[1:]


def sentences(seed: int, count: int, held_out: bool = False) -> list[str]:
    """Make `count` different sentences of 3 to 20 words; a smaller count gives the first of them.

    Training sentences (the default) and held-out ones have no template in common, and the fillers behind the bar stand in
    held-out ones only.
    """
    return _different(count, Random(f"sentences {seed} {held_out}"), partial(sentence, held_out=held_out))


def unseen_sentences(seed: int, count: int) -> list[str]:
    """Make `count` different sentences that training never has, of templates and words that it has."""
    return _different(count, Random(f"unseen sentences {seed}"), partial(_drawn, _TRAINED_LINES, wanted=withheld))


def _different(count: int, rng: Random, make: Callable[[str, Random], str]) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < count:
        made[make(rng.choice(KINDS), rng)] = None
    return list(made)


def sentence(kind: str, rng: Random, *, held_out: bool = False) -> str:
    """Make one sentence of one of `KINDS`, of 3 to 20 words."""
    if held_out:
        return _drawn(_HELD_OUT_LINES, kind, rng, wanted=lambda _: True, held_out=True)
    return _drawn(_TRAINED_LINES, kind, rng, wanted=lambda text: not withheld(text))


def _drawn(
    templates: Mapping[str, Sequence[str]],
    kind: str,
    rng: Random,
    *,
    wanted: Callable[[str], bool],
    held_out: bool = False,
) -> str:
    """Draw one sentence from `templates` of a kind until one is fit and `wanted`."""
    while True:
        text = capitalised(_filled(rng.choice(templates[kind]), rng, held_out, set()))
        if FEWEST_WORDS <= len(text.split()) <= MOST_WORDS and wanted(text):
            return text


def withheld(text: str) -> bool:
    """Whether training never has this text: one in eight, by its checksum."""
    return zlib.crc32(text.encode()) % _WITHHELD_EVERY == 0


def words(text: str) -> list[str]:
    """The words of a text in lower case, without marks."""
    return _WORD.findall(text.lower())


def vocabulary(*, held_out: bool = True) -> frozenset[str]:
    """Every word that sentences can have, in lower case; without `held_out` those of training sentences."""
    texts = [line for lines in _TRAINED_LINES.values() for line in lines]
    if held_out:
        texts += [line for lines in _HELD_OUT_LINES.values() for line in lines]
    texts += [filler for slot in _CHOICES for filler in fillers(slot, held_out=held_out)]
    plain = (word for text in texts for word in words(_SLOT.sub(" ", text)))
    # What stands for a or an is part of a slot.
    return frozenset(plain) | _CLOSED_WORDS | {"a", "an"}


def _proper_names() -> dict[str, str]:
    slots = ("girl", "boy", "city", "country", "day", "month")
    names = [name for slot in slots for filler in fillers(slot, held_out=True) for name in filler.split()]
    return {name.lower(): name for name in names if name.lower() not in _ALSO_WORDS}


_PROPER = _proper_names() | {"i": "I", "i'm": "I'm", "i'll": "I'll", "i've": "I've", "i'd": "I'd"}


def sentence_case(reference: str) -> str:
    """A LibriSpeech reference (capitals, no marks) in the form of the grammar's sentences; only names it knows get capitals."""
    cased = (_PROPER.get(word, word) for word in reference.lower().split())
    return capitalised(" ".join(cased)) + "."


def references(path: Path) -> list[str]:
    """The texts of a LibriSpeech `*.trans.txt` file (an id, a space, the text a line), in the file's order and in capitals.

    ValueError for a file without any, or that is no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8; name a folder of LibriSpeech's reference texts") from None
    found = [text for line in lines if (text := line.partition(" ")[2].strip())]
    if not found:
        raise ValueError(f"{path} holds no text; a line is an id, a space and words in capitals")
    return found


def pieces(reference: str) -> list[str]:
    """Cut a reference into even pieces of at most 16 words, in sentence case."""
    parts = reference.split()
    count = -(-len(parts) // PIECE_WORDS)
    edges = [len(parts) * piece // count for piece in range(count + 1)]
    return [sentence_case(" ".join(parts[begin:end])) for begin, end in pairwise(edges)]


def word_lists(texts: Sequence[str], seed: int, count: int) -> list[str]:
    """Make `count` lines of 3 to 9 words drawn evenly from the different words of `texts`: sound without sense.

    A recogniser can't guess these from what usually follows, so it learns to spell what it hears.
    """
    rng = Random(f"word lists {seed}")
    known = sorted({word for text in texts for word in text.lower().split()})
    return [sentence_case(" ".join(rng.choice(known) for _ in range(rng.randrange(3, 10)))) for _ in range(count)]


def corpus(seed: int, count: int, texts: Sequence[str]) -> list[str]:
    """Make `count` lines to speak for training: half of the grammar, three in ten pieces of the references `texts`, one in
    five word lists of their words. A smaller count gives the first of them."""
    rng = Random(f"corpus {seed}")
    cut = [piece for text in texts for piece in pieces(text) if len(piece.split()) >= FEWEST_WORDS]
    sources = {
        "sentences": iter(sentences(seed, count)),
        "pieces": (rng.choice(cut) for _ in range(count)),
        "word lists": iter(word_lists(texts, seed, count)),
    }
    drawn = Random(f"corpus sources {seed}").choices(tuple(sources), weights=(5, 3, 2), k=count)
    return [next(sources[name]) for name in drawn]


def unheard_texts(texts: Sequence[str], trained: Sequence[str], seed: int, count: int) -> list[str]:
    """Choose `count` of the references `texts` that have 5 to 20 words and no five in a row that a text of `trained` has.

    dev-clean and test-clean have twenty texts in common, word for word. What is chosen keeps its own form.
    """
    fitting = [text for text in apart(texts, trained) if 5 <= len(text.split()) <= MOST_WORDS]
    return Random(f"unheard texts {seed}").sample(fitting, count)


def apart(texts: Sequence[str], others: Sequence[str]) -> list[str]:
    """Those of `texts` that have no five words in a row that one of `others` has, and are none of them whole."""
    known = {run for text in others for run in _runs(text)}
    return [text for text in texts if known.isdisjoint(_runs(text))]


def _runs(text: str) -> set[tuple[str, ...]]:
    """Every five words in a row; of fewer all."""
    parts = text.split()
    return {tuple(parts[begin : begin + 5]) for begin in range(max(len(parts) - 4, 1))}
