"""Parameters that stream through memory under autograd, and the gradients that come back."""
