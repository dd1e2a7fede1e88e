"""The Qwen3-Omni model, its checkpoint and its walk table. `engine.model.omni.load_model` loads one whole."""
