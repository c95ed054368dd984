"""Other libraries' import paths, so that scripts written for them run here: `colossalai`."""
