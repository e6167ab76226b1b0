"""Functions compiled ahead of their calls. The function of users is ``fusible.lazy.compilation.compile.compile``."""
