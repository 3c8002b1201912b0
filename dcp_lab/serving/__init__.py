"""Run a vLLM server as an experiment: start it, load it, ask it, and leave nothing running."""

from __future__ import annotations

from dcp_lab.serving.model_folder import (
    LATENT_TWO_GPUS,
    STUDY1_TWO_GPUS,
    TINY,
    LatentShape,
    ModelShape,
    write_latent_folder,
    write_model_folder,
)
from dcp_lab.serving.server import Server, ServerConfig, ServerError, serve

__all__ = [
    "LATENT_TWO_GPUS",
    "STUDY1_TWO_GPUS",
    "TINY",
    "LatentShape",
    "ModelShape",
    "Server",
    "ServerConfig",
    "ServerError",
    "serve",
    "write_latent_folder",
    "write_model_folder",
]
