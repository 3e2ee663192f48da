"""The demonstration: a training job starved by a slow object store, with and without data echoing."""
