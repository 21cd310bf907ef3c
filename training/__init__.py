"""Training of the bundled model "nano": data, trainable model, optimiser, export and evaluation."""
