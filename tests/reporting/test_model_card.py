"""The model card: front matter that the hub reads, and the report's numbers."""

import yaml
from reports import a_report

from quantpipe.reporting.model_card import render_model_card


def front_matter(card: str) -> dict[str, object]:
    _, text, _ = card.split("---\n", 2)
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def test_the_front_matter_names_base_model_quantization_and_library() -> None:
    front = front_matter(render_model_card(a_report()))
    assert front["base_model"] == "acme/legal-7b"
    assert front["base_model_relation"] == "quantized"
    assert front["library_name"] == "transformers"
    assert front["tags"] == ["quantpipe", "compressed-tensors", "w8a8"]


def test_its_metrics_are_those_of_the_checks() -> None:
    [model] = front_matter(render_model_card(a_report()))["model-index"]  # type: ignore[misc]
    metrics = {each["type"]: each["value"] for each in model["results"][0]["metrics"]}  # type: ignore[index]
    assert metrics == {"mean_kl": 0.0311, "accuracy_loss_points": 4.01}


def test_a_base_model_that_is_not_from_the_hub_is_not_named_as_if_it_were() -> None:
    for origin in (".../model.gguf", "pypi:some-wheel==1.0/some/model.gguf", "./models/bot", "~/models/bot"):
        card = render_model_card(a_report(base_origin=origin))
        assert origin in card
        assert "base_model" not in front_matter(card)


def test_the_card_says_that_the_licence_is_not_known() -> None:
    assert "Fill this in before you publish" in render_model_card(a_report())
