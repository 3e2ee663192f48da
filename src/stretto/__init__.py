"""stretto keeps accelerators busy: data echoing for training runs that wait for their input pipeline."""
