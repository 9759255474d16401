"""``python -m torchpin bench``: stock PyTorch against torchpin, on the machine it is run on.

Who does what:

- ``command`` reads the command line, ``cases`` says what can be measured and holds the presets;
- ``runner`` lives in the process of the command line, which never imports torch. It keeps one server
  process for each way that batches can take (stock, torchpin's modes, other libraries) and asks them
  in turn, so that whatever else the machine does meets all of them alike;
- ``measure`` is that server. It imports torch once and forks for every measurement, so that each of
  them finds a process without pinned memory, threads or a device context. The server itself starts
  none of these, which is what makes the fork safe;
- ``loads`` holds the datasets and collate functions, ``ways`` makes an iterator of batches from them;
- ``results`` is what came out, ``report`` and ``plot`` show it.

All processes of a server are in its process group. However the command line ends, it kills that group
and waits until nobody is left in it; if it is killed itself, the kernel ends the servers.
"""
