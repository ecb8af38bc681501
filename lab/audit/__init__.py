"""``lab audit``: run anybody's training script on a few ranks and say what it really computes."""
