"""The ring's one rule: decisions know arrays and names, nothing of torch."""

import subprocess
import sys

# The last two come with NumPy: a part of it, and what its f2py imports where it is installed.
ALLOWED = {"numpy", "array_api_compat", "trimtab", "cython_runtime", "charset_normalizer"}

CODE = """
import sys
before = set(sys.modules)
import trimtab.control
controller = trimtab.control.robust().start(3)
controller.update([1.0, 0.0, float("nan")])
controller.load_state_dict(controller.state_dict())
import trimtab.control.theory
trimtab.control.AdaptStyle(1).start(2).update([1.0, 1.0])
trimtab.control.MatchedRandom([1], 0).start(2).update([1.0, 1.0])
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(name for name in loaded if name not in sys.stdlib_module_names and not name.startswith("_")))
print(*sorted(name for name in sys.modules if name.startswith("trimtab.")))
"""


def test_control_imports_no_torch_and_no_other_ring():
    answer = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    packages, modules = (line.split() for line in answer.splitlines())
    assert set(packages) <= ALLOWED
    assert all(name.startswith(("trimtab.control", "trimtab.errors", "trimtab._version")) for name in modules)
