"""What trains: settings, process group, data, models, gradient synchronisation, engine, evaluation and records."""
