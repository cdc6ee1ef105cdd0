"""The keywords of budgets."""

import dataclasses
from typing import get_type_hints

from jvarlen import Budget
from jvarlen.planning.budget import BudgetFields, PlanBudgetFields


def test_keywords_of_a_budget_are_its_fields():
    fields = {field.name for field in dataclasses.fields(Budget)}
    types = {name: hint for name, hint in get_type_hints(Budget).items() if name in fields}
    assert get_type_hints(PlanBudgetFields) == types
    assert get_type_hints(BudgetFields).keys() == fields - {"max_tokens"}
    assert not PlanBudgetFields.__required_keys__
