"""SGLang's pools over kvpool."""
