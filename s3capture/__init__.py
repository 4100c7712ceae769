"""Keep the training tokens of reinforcement-learning rollouts safe on object storage."""
