"""The kernel's side: configuration, the event loop that owns the engine, and the model."""
