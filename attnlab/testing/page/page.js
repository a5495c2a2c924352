for (const details of document.querySelectorAll("tr.wrong details, tr.ignored details")) details.open = true;
