"""Number formats: how a quantized tensor of one lies in memory and is read, whatever the backend."""
