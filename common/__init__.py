"""What trains: settings, process group, data, models, strategies, engine, evaluation, reports."""
