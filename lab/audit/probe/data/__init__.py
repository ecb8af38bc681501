"""Which samples a script is given: by its loaders, from its datasets, and what they hold."""
