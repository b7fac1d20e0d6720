"""Replicas: engines in processes of their own, among which one caller's requests are divided."""
