"""``fusible trace``: the programs that a script records, in every form that they take."""
