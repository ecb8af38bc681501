"""The figures of a report: rows (figures, cost_figures), lines (curves), a step (timeline_figure).

``row_panels`` has the axes that the figures of rows share. ``svg`` saves a figure and shrinks it
for the page. ``figure_pages`` lists and captions all figures.
"""
