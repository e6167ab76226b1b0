"""The first IR: one operation per call that the user made. The class is ``fusible.lazy.trace.trace.Trace``."""
