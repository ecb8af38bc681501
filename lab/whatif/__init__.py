"""``lab whatif``: one offline page to look at predictions, beside what was measured."""
