"""Offline tools: load generation, traces, replays in virtual time, sizing, and comparisons."""
