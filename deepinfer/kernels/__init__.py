"""Operations of the model. `reference` defines what is right; `select` picks a faster twin where one exists."""
