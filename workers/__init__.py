"""The application on top of deltastore: a trainer, actors, and the demo that runs them."""
