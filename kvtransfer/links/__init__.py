"""An agent's connections to other agents (links): how they are opened, verified, and lost."""
