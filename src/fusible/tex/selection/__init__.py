"""From a call to the backend that serves it: dispatch on the hot path, the registry and the policy behind it, and recorders of calls."""
