"""A training run as a folder that timm and the Hugging Face Hub take: weights, config.json, a model card."""
