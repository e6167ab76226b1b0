"""What a user touches: the lazy tensor, its methods, and the functions that compose trace operations."""
