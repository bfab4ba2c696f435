"""The console can be read in any light, on any screen, with any device."""

from __future__ import annotations

from browser import Page
from steps import dead_letter, go, listening, publish, push

from headwater import Log

PAGES = ("overview", "messages", "subscriptions", "dead-letters", "replicas", "lake", "api")
FAINT = """
(() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (part) => (part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [red, green, blue] = rgb(color).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return rgb(color)[3] === 0 ? ground(element.parentElement) : color;
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let looked = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest(":disabled, option")) continue;
    looked += 1;
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort().reverse();
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(`${element.tagName} ${element.className}: ${element.textContent}`);
  }
  return [looked, faint];
})()
"""


def fill_the_page(page: Page, log: Log) -> None:
    """Something to see in every part of the page, and an error."""
    listening(page)
    push(page, "shop/" + 25 * "long", "before the move")
    page.until("document.querySelector('#replica-rows tr')")
    log.publish("orders.paid", {"order": 17, "paid": True, "note": None}, headers={"region": "eu"})
    page.until("document.querySelector('#tail strong').textContent === 'orders.paid'")
    page.until("document.querySelector('#letter-list summary')")
    page.click("#tail summary")
    page.click("#letter-list summary")
    page.until("document.querySelector('#letter-list .letter')")
    page.click("#letter-list .letter summary")
    page.click("#letter-list .letter input")
    publish(page, "orders.new", "{nope")
    page.click("#find-form button")
    page.until("document.querySelectorAll('#found-rows tr').length >= 3")
    page.click("#find-form .more summary")
    page.click("#found-rows tr:last-child a")
    page.until("document.querySelector('#message-body details')")
    page.click("#message-body summary")  # of the subscriptions that do not match
    page.until("document.querySelector('#message-body .deliveries')")
    page.until(
        "!document.getElementById('publish-problem').hidden && document.querySelectorAll('details pre').length >= 4"
    )


def test_all_text_stands_out_from_its_ground(page: Page, log: Log) -> None:
    with dead_letter(page, log, "mails", 1):
        fill_the_page(page, log)
        grounds = set()
        for scheme in ("light", "dark"):
            page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            total = 0
            for name in PAGES:
                go(page, name)
                looked, faint = page.evaluate(FAINT)
                assert faint == []
                total += looked
            assert total > 100
    assert len(grounds) == 2


def test_nothing_sticks_out_sideways(page: Page, log: Log) -> None:
    log.publish("a." + 25 * "long", {"text": 300 * "x"})
    with dead_letter(page, log, "mails", 1):
        fill_the_page(page, log)
        for width in (320, 390, 768, 1280, 1920):
            size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 700}
            page.command("Emulation.setDeviceMetricsOverride", **size)
            assert page.evaluate("innerWidth") == width
            for name in PAGES:
                go(page, name)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name


def test_every_control_has_a_name(page: Page, log: Log) -> None:
    with dead_letter(page, log, "mails", 1):
        fill_the_page(page, log)
        tree = []
        for name in PAGES:
            go(page, name)
            tree += page.command("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "textbox", "searchbox", "combobox", "link", "region", "DisclosureTriangle")
    controls = [node for node in tree if not node["ignored"] and node["role"]["value"] in roles]
    assert len(controls) > 60
    assert [node for node in controls if not node.get("name", {}).get("value")] == []


def test_data_can_be_published_without_a_mouse(page: Page) -> None:
    go(page, "messages")
    page.fill("topic", "orders.new")
    page.fill("data", "1")
    for kind in ("rawKeyDown", "keyUp"):
        page.command(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, modifiers=2
        )
    page.until("document.getElementById('published').textContent === 'Stored as seq 1'")


REACHED = """
(() => {
  const { activeElement: at } = document, style = getComputedStyle(at);
  return [at.getAttribute("aria-label") || at.textContent.trim() || at.id, style.outlineStyle, style.outlineWidth];
})()
"""


def test_the_tab_key_reaches_everything_on_the_overview_and_shows_where_it_is(page: Page, log: Log) -> None:
    log.publish("orders.new", 1)
    page.until("document.querySelector('#topic-rows .link') && document.querySelector('#charts circle')")
    wanted = ["Overview", "Messages", "Lake", "API", "Hour", "Day", "Week", "topic-filter", "orders.new"]
    wanted += page.evaluate(
        "[...document.querySelectorAll('#charts .chart:not([hidden])')].map((each) => each.ariaLabel)"
    )
    assert len(wanted) > 10
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(40):
        for kind in ("rawKeyDown", "keyUp"):
            page.command("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(page.evaluate(REACHED))
    names = {name.split(":")[0] for name, *_ in reached}
    assert {name.split(":")[0] for name in wanted} - names == set()
    assert [each for each in reached if each[0] in wanted and each[1:] == ["none", "0px"]] == []


def test_the_lines_of_charts_stand_out_from_their_ground(page: Page, log: Log) -> None:
    """The colours of the series stand out from the ground, as lines must: 3 to 1."""
    page.until("document.querySelector('#charts .figure')")
    script = """
    (() => {
      const rgb = (text) => (text.match(/[\\d.]+/g) ?? []).slice(0, 3).map(Number);
      const linear = (part) => (part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
      const light = (color) => {
        const [red, green, blue] = rgb(color).map(linear);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
      };
      const figure = document.querySelector("#charts .figure");
      const ground = light(getComputedStyle(figure).backgroundColor);
      return Array.from({ length: 8 }, (_, at) => {
        const probe = figure.appendChild(document.createElement("i"));
        probe.className = `s${at + 1}`;
        probe.attributeStyleMap.set("color", "var(--c)");
        const [a, b] = [light(getComputedStyle(probe).color), ground].sort((x, y) => y - x);
        probe.remove();
        return (a + 0.05) / (b + 0.05);
      });
    })()
    """
    for scheme in ("light", "dark"):
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert min(page.evaluate(script)) >= 3, scheme
