"""``lab whatif``: one offline page that predicts steps as a reader changes cluster and training."""
