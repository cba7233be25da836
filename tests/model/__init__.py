"""Tests on a real model: SmolLM2-135M and its twins."""
