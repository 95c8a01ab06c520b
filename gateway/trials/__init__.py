"""Policies on trial: shadows that are asked and serve nothing, and canaries that serve a part."""
