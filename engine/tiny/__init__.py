"""Makes the small trained model: its texts, speech, training and export. Nothing that serves imports it."""
