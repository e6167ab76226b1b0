"""What runs a call of modules, and what a user of modules never opens: from the call to a plan (``runner``), its passes as autograd nodes (``call``,
``fast_path``), who runs them (``executors``, ``replay``, ``xla_executor``), the state they read (``scaling``, ``weights``), and the same under
``torch.compile`` (``compiled``)."""
