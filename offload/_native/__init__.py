"""The compiled modules and one thin wrapper each; the only place that touches cffi."""
