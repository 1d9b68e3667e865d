"""Mathematics that several methods share, as pure functions of tensors."""
