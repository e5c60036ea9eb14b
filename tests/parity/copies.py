"""Ways of copying a model through bytes."""

import io
import pickle

import torch


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))
