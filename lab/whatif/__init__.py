"""``lab whatif``: predictions of `lab predict` as a page with sliders, beside measurements."""
