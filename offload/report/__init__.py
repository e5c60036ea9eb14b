"""Plots for reports, as SVG."""
