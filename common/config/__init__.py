"""Settings of a run: one frozen dataclass, the flags made from it, and recipes. No torch here."""
