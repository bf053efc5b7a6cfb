from quantpipe import errors


def test_exit_codes_are_distinct() -> None:
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert len(codes) == len(set(codes)) == 8


def test_nearest_name_is_offered_with_all_that_are_known() -> None:
    assert errors.suggest("gtpq", ["rtn", "gptq"]) == "; did you mean 'gptq'? (known: gptq, rtn)"
    assert errors.suggest("xyz", ["rtn", "gptq"]) == " (known: gptq, rtn)"


def test_request_errors_name_the_parameter() -> None:
    error = errors.RequestError("temperature: -1 is negative", param="temperature")
    assert (str(error), error.param) == ("temperature: -1 is negative", "temperature")
