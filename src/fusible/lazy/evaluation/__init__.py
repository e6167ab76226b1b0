"""From a recorded tensor to its value: programs are compiled through the IRs, kept, and run."""
