"""Ship only the bits that a training step changed, losslessly, through one bucket per region."""

__version__ = "0.1.0"
