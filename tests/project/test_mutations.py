"""The list of seeded faults fits the tree as it is."""

import pytest

from tests.project.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.file)
def test_each_fault_has_one_place_and_tests(mutation: Mutation) -> None:
    assert (ROOT / "fshard" / mutation.file).read_text().count(mutation.right) == 1
    assert (ROOT / "tests" / mutation.tests.split()[0]).exists()
