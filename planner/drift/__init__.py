"""`penstock drift`: whether recorded requests have the shapes that a fleet was sized for."""
