"""Figures: each one function of a frame, made with plotly. ``chatspace_lab.analysis`` names them."""
