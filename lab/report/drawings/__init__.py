"""The figures of a report: rows (figures), lines (curves), a step (timeline_figure).

``svg`` saves a figure and shrinks it for the page. ``figure_pages`` lists and captions all figures.
"""
