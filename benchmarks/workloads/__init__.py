"""The study's five workloads: small enough for one core, on real data, each a file that `stretto study` runs.

| module | what is trained | until |
|---|---|---|
| `resnet_fashion` | a ResNet on Fashion-MNIST | test accuracy |
| `photographs` | a convolutional net on JPEG tiles of photographs, decoded in the loader | test accuracy |
| `text_wordnet` | a Transformer on the definitions of WordNet, character by character | test cross-entropy |
| `text_linux` | a Transformer on Linux's documentation, byte by byte | test cross-entropy |
| `detector` | a single-shot detector on scenes composed from photographs and cut-outs | test mAP |

Each has `train(settings, make_loader, seed)`, which yields once after each update, `load_data()`, and `study`, the
`stretto.study.Study` of it. Its docstring says which target and why. Data is fetched or made once, into the user's
cache (~/.cache/stretto, or under $XDG_CACHE_HOME).
"""
