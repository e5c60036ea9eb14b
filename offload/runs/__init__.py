"""Runs from a configuration: model and data, plan and probe, the loop, results, inspection."""
