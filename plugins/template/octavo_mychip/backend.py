"""Who mychip is, whether there is one, and what it can do. Imports no torch and no driver."""

from octavo.plugins import Backend, Capabilities, Ops, Probe

# The operations of ops.py and what runs them, for `octavo devices`; the others are portable.
MINE = {"act_and_mul": "octavo-mychip"}


class MychipBackend(Backend):
    name = "mychip"
    device_types = ("mychip",)  # the words that --device takes
    # Below 0 `--device auto` never chooses it. Give it more than 10, which is the cpu backend's, once
    # it is faster than that.
    priority = -1

    def probe(self) -> Probe:
        # Look for the driver's device node or library here, and do not import it: `octavo devices`
        # asks every backend, also on machines without this chip. Where there is none, say what to
        # install: return Probe(reason="no /dev/mychip0: is the driver loaded?")
        return Probe(devices=("mychip",), details={"runs on": "the CPU so far"})

    def torch_device(self, device: str) -> str:
        # Where tensors live. A chip with a torch device of its own returns that.
        return "cpu"

    def capabilities(self, device: str) -> Capabilities:
        # Declare what works and no more: `octavo backend check` tries all of it but graph_capture and
        # collectives, and what is missing is refused when an engine starts, not amid a request.
        return Capabilities(
            dtypes=("float32", "bfloat16"),
            kv_dtypes=("float32", "bfloat16"),
            ops=MINE,
            # Scorecards say where operations ran. Take this line away when that is the chip itself.
            notes={"execution": "stand-in"},
        )

    def ops(self, device: str) -> Ops:
        from octavo_mychip.ops import MychipOps  # imports torch, so not at the top

        ops = MychipOps()
        ops.device = self.torch_device(device)
        return ops
